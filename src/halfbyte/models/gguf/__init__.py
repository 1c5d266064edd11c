"""Reading GGUF files: the weights, configuration and tokenizer of a model as transformers knows them."""
