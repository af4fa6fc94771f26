"""How messages travel: protobuf forms, frames over a Unix socket, the progress page, gRPC channels.

Only ``channel`` and ``control_pb2_grpc`` import grpc. Ranks use the rest and must never load it: they are
forked, and grpc's threads do not survive a fork.
"""
