"""What is trained: texts, images, point clouds, and their models."""
