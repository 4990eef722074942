// Applies the PyTorch settings of the client (../settings.h) to this process, which serves one session.
#pragma once

#include <optional>

#include "../settings.h"

namespace genie {

// Reads the body of a Settings record. ProtocolError for a value that does not exist.
Settings read_settings(WireReader& in);

class SessionSettings {
 public:
  // For the ops that follow.
  void set(const Settings& settings);
  // None before the first set().
  const std::optional<Settings>& current() const { return current_; }
  // The settings of a graph, until restore().
  void apply_temporarily(const Settings& settings);
  void restore();
  // Applies settings of threads. Call on a thread that has begun to serve the session.
  void apply_to_thread() const;

 private:
  std::optional<Settings> current_;
  std::optional<Settings> applied_;  // differs from `current_` while a graph runs
};

}  // namespace genie
