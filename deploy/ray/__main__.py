"""`python -m deploy.ray`: replicas on a Ray cluster, and the ingress in this process.

Without `--address` a cluster of this machine alone is started, which listens on 127.0.0.1, and
ends with this process.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gateway import __version__, logs
from gateway.app.limits import CACHE_SHARE
from gateway.registry import Catalog, load_catalog
from gateway.settings import Settings, load_settings, variables

log = logs.get("ray")

MLX: Final = "gateway.app.engines:MlxEngines"
ROUTER: Final = "deploy.ray.router:GatewayRouter"
DEVICE: Final = "device"  # the resource of a node that one replica takes
STORE_BYTES: Final = 128 * 1024 * 1024  # Ray's shared memory: calls go by gRPC, not through it
STATS_S: Final = 0.4  # Ray waits up to a tenth more, and a loop of its own: half a second in all
# How calls travel: by gRPC and without threads between, so that who reads slowly is waited for.
TRANSPORT: Final = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# The name is of other systems; without it Ray takes 127.0.0.1 for the machine's outer address.
ALONE: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def main() -> None:
    """Run until SIGTERM or SIGINT, then drain."""
    options = _options()
    # Before Ray is imported: it reads them then, and its processes inherit them.
    os.environ |= TRANSPORT
    if options.address is None:
        os.environ |= ALONE
        # Ray gives a process one thread for BLAS unless told; on a CPU they share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.most)))
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        sys.exit("A cluster's ports run what they are sent: set RAY_AUTH_MODE=token on every node.")
    given = {"models": options.models, "host": options.host, "port": options.port}
    settings = load_settings(given)
    logs.configure(settings.log_level, settings.log_format)
    load_catalog(settings.models, variables())  # raises before anything is started
    log.info("starting", version=__version__, models=str(settings.models))
    for_replicas: dict[str, Any] = {"models": str(settings.models)}
    if options.address is None and settings.cache_max_bytes is None and options.engines == MLX:
        for_replicas["cache_max_bytes"] = _share_of_memory(settings, options.most)
    with _cluster(options):
        handle = _deploy(options, settings, for_replicas)
        asyncio.run(_serve(handle, settings))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray")
    parser.add_argument("--replicas", type=int, default=2, help="to begin with, and at least")
    parser.add_argument("--most", type=int, help="to follow the tokens that wait up to so many")
    parser.add_argument("--address", help="a cluster's address; none starts one here")
    parser.add_argument("--models", type=Path, help="the file that says which models")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="port to listen on; 0 picks one")
    parser.add_argument(
        "--engines", default=MLX, help=argparse.SUPPRESS
    )  # tests have scripted ones
    parser.add_argument("--router", default=ROUTER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.most = max(options.replicas, options.most or 0)
    return options


def _share_of_memory(settings: Settings, replicas: int) -> int:
    """Return what each of several replicas on one device may hold of its memory."""
    from gateway.engine import device

    return int(CACHE_SHARE * device.memory_bytes(device.choose_device(settings.device))) // replicas


@contextlib.contextmanager
def _cluster(options: argparse.Namespace) -> Iterator[None]:
    """Connect to the cluster, or run one on this machine until exit."""
    import ray
    from ray import serve

    if options.address is not None:
        ray.init(address=options.address, log_to_driver=True, logging_level="warning")
    else:
        ray.init(
            address="local",  # a cluster of its own, even where another runs on this machine
            num_cpus=options.most,
            num_gpus=0,
            resources={DEVICE: options.most},
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=STORE_BYTES,
            log_to_driver=True,
            logging_level="warning",
        )
    try:
        serve.start(proxy_location="Disabled")
        yield
    finally:
        ray.shutdown()


def _deploy(options: argparse.Namespace, settings: Settings, given: Mapping[str, Any]) -> Any:
    """Start the replicas, and return their handle. It does not wait until they are ready."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from deploy.ray.replica import Replica

    catalog = load_catalog(settings.models, variables())
    scaling: dict[str, Any] = {"num_replicas": options.replicas}
    if options.most > options.replicas:
        policy = AutoscalingPolicy(policy_function="deploy.ray.scaling:follow_tokens")
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.replicas,
                max_replicas=options.most,
                upscale_delay_s=5,
                downscale_delay_s=300,
                look_back_period_s=5,
                metrics_interval_s=1,
                policy=policy,
            )
        }
    deployment = serve.deployment(
        Replica,
        name="gateway",
        # Ray's default of 5 would leave nothing to batch. The gateway refuses what is too much.
        max_ongoing_requests=settings.queue_limit * max(1, len(catalog.specs)) + 64,
        max_queued_requests=-1,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=settings.drain_s + 15,
        ray_actor_options={"num_cpus": 0, "resources": {DEVICE: 1}},
        request_router_config=RequestRouterConfig(
            request_router_class=options.router,
            request_routing_stats_period_s=STATS_S,
            request_routing_stats_timeout_s=5,
        ),
        **scaling,
    )
    target = serve.RunTarget(
        deployment.bind(options.engines, given), name="gateway", route_prefix=None
    )
    [handle] = serve.run_many([target], wait_for_applications_running=False)
    return handle


async def _serve(handle: Any, settings: Settings) -> None:
    from ray import serve

    from deploy.ray.ingress import Ingress
    from gateway.cli.serve import run

    def read() -> Catalog:
        return load_catalog(settings.models, variables())

    salt = os.environ.get("GATEWAY_RAY_SALT", "").encode() or secrets.token_bytes(32)
    try:
        await run(Ingress(handle, settings, read, salt), settings)
    finally:  # here, on the loop that the router runs on
        await serve.shutdown_async()


if __name__ == "__main__":
    main()
