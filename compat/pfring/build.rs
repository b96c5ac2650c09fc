//! The library's name for the dynamic loader, and what it does not export.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpfring.so");
    // libvnplug's own C functions are libvnplug.so's to export.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
