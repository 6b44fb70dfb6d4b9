"""Text generation and conversations with a trained model."""
