"""What requests keep of their tokens between passes: keys and values, and recurrent states."""
