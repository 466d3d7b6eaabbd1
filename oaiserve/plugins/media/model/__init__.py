"""Images and sounds of prompts: from clients' files to what a model's towers take."""
