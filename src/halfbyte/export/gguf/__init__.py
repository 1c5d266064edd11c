"""GGUF files, as llama.cpp and Ollama read them."""
