// Python bindings of streams: both ends do the handshake in Python, then pass the stream to C++.
//
// Each library binds its own class, so that both can be loaded in one process.
#pragma once

#include <memory>

#include <pybind11/pybind11.h>

#include "stream.h"

namespace genie {

// Stream.plaintext(fd), .tls_client(fd, ca_der, server_name, timeout_s), .tls_server(fd, certificate_path,
// key_path, timeout_s); read_exactly, write_all, downgrade_to_plaintext, shut_down, close, encrypted; and the
// exceptions ConnectionLost and TlsHandshakeFailed. Timeouts are in seconds; None waits forever. The stream
// owns the descriptor in any case: detach it from its socket object.
void bind_stream(pybind11::module_& module);

// The stream of a Python object of this library. ConnectionLost if it is closed, or TLS was shut down on it.
std::shared_ptr<Stream> stream_from_python(pybind11::handle object);

}  // namespace genie
