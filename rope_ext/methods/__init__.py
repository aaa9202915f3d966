"""One file a method; the registry finds them by walking this package, and they never import each other."""
