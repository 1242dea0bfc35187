"""As many replicas as the tokens that wait need: Ray's autoscaling policy. Ray pickles it by value.

Ray averages each replica's tokens over the look-back period before they come here.
"""

from typing import Any

from deploy.ray.choice import replicas_for

TARGET_TOKENS = 4096  # waiting or running, a replica: a second or two of prompts on a Mac


def follow_tokens(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas wanted, and no state."""
    by_replica = context.aggregated_metrics.get("tokens", {})
    wanted = replicas_for(
        sum(by_replica.values()),
        context.target_num_replicas,
        TARGET_TOKENS,
        context.capacity_adjusted_min_replicas,
        context.capacity_adjusted_max_replicas,
    )
    return wanted, {}
