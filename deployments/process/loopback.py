"""Keeps Ray Serve's replicas off the network when the application lives on one machine.

Every Serve replica opens a gRPC port on all interfaces, once its own code is up, and obeys every client. There is no
setting for the address (ray 2.60), so the one function that binds it is told another.
"""

import os

from ray.serve._private import replica

from deployments.process.environment import LOOPBACK_ENV


def keep_to_loopback() -> None:
    """Call in a replica before its construction ends; does nothing unless LOOPBACK_ENV is set."""
    if LOOPBACK_ENV not in os.environ:
        return
    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", "127.0.0.1"))
