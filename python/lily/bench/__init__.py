"""What `lily bench` measures. Nothing else imports it; mlx, llama_cpp and gguf are looked for when needed."""
