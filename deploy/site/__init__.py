"""The documentation's site (`make site`): its hooks, and the reference made from /openapi.json."""
