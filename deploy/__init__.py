"""What runs the gateway elsewhere: units, a container, boards, and Ray Serve (ray)."""
