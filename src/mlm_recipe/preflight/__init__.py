"""The child: builds one program and proves it. jax only, so that it runs on old jax too."""
