"""What runs the gateway elsewhere: units, containers, boards, Ray Serve (ray); and the site."""
