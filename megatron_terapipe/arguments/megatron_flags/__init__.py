"""Flags of Megatron-LM, Megatron-DeepSpeed and their relatives: accepted, without effect, or refused."""
