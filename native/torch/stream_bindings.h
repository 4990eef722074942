// Streams for Python: both ends set a connection up there, then the C++ side takes it over.
//
// Each library binds its own class, so that both may live in one process.
#pragma once

#include <memory>

#include <pybind11/pybind11.h>

#include "stream.h"

namespace genie {

// Stream.bare(fd), .tls_client(fd, ca_der, server_name, timeout_s), .tls_server(fd, certificate_path,
// key_path, timeout_s); read_exactly, write_all, without_tls, shut_down, close, encrypted; and the exceptions
// ConnectionLost and TlsRefused. Times are seconds; None waits for ever. The descriptor is taken over in any
// case: detach it from its socket object.
void bind_stream(pybind11::module_& module);

// The stream of a Python object of this library. ConnectionLost when it is closed or TLS was ended on it.
std::shared_ptr<Stream> stream_of(pybind11::handle object);

}  // namespace genie
