"""`mlx-gateway schema`: the JSON Schema of models.yaml, for editors."""

import json

from gateway.registry import json_schema


def schema() -> None:
    """Print the JSON Schema of models.yaml."""
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
