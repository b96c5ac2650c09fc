//! vnplug-web: see the library of this crate.

use std::process::ExitCode;

fn main() -> ExitCode {
    vnplug_web::page()
}
