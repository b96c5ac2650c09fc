//! libvnplug.
