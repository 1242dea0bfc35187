"""Several gateways behind one address, on Ray Serve (README.md).

choice       which replica answers, and how many there should be: numbers in, no Ray
calls        a request's body → what decides, digests in the place of what it says
merging      one answer of all replicas'
router       Ray's replicas and their reports → candidates
board        what router and ingress share: who is there, what was chosen
scaling      Ray's autoscaling policy
replica      a gateway without a port
ingress      the gateway's front without engines
"""
