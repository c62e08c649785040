"""One call of the backend: AOTAutograd, then each of its graphs through the stages."""
