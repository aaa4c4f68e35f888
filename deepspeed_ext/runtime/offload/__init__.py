"""What token slices leave on stages waits in the memory of the host: buffers there, and the copies to and from them."""
