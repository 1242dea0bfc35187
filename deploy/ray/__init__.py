"""Several gateways behind one address, on Ray Serve.

choice       which replica answers: numbers in, a name out; no Ray
calls        a request's body → what decides, digests in the place of what it says
"""
