"""The etcd v3 messages and calls that Genie uses: two small .proto files and what protoc makes of them.

Made, from the repository's root, by

    python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \\
        genie/controller/store/etcd_proto/kv.proto genie/controller/store/etcd_proto/rpc.proto
    python -m grpc_tools.protoc -I . --grpc_python_out=. genie/controller/store/etcd_proto/rpc.proto

`rpc_pb2_grpc.pyi` is written by hand (protoc makes no types for calls). A test holds the
generated files to the .proto files. Not for: behaviour; that is etcd.py and its neighbours.
"""

from __future__ import annotations
