//! Which frames a port wants.
