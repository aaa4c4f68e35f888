"""Saving: files written aside and synced, a manifest, one rename, and `latest` last."""
