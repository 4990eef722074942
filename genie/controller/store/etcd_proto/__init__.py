"""The etcd v3 messages and calls that Genie uses: two small .proto files and their generated code.

Generated from the root of the repository with

    python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \\
        genie/controller/store/etcd_proto/kv.proto genie/controller/store/etcd_proto/rpc.proto
    python -m grpc_tools.protoc -I . --grpc_python_out=. genie/controller/store/etcd_proto/rpc.proto

`rpc_pb2_grpc.pyi` is written by hand, because protoc generates no types for calls. A test compares
the generated files with the .proto files.
"""

from __future__ import annotations
