"""What a distillation gained, on prompts that it never saw."""
