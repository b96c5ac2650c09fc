//! What the dynamic loader is told of the module.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // libvnplug's own C functions are libvnplug.so's to export.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    // libvdeplug unloads a module with its last connection; what threads keep for Rust's standard
    // library must outlive that.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
