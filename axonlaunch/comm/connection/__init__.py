"""Connects ranks: rendezvous, authenticated stores, gloo and NCCL."""
