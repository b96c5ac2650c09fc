//! `make demo-switch`: guests, a container and an old program on one switch, in less than three minutes.
//!
//!     demo-switch [--vnplug PROGRAM] [--out DIR]
//!
//! Needs root, for network namespaces. Writes `switch.svg`, `found.pcapng` and the recording to
//! `target/demo-switch`. Ends with 0 when everybody reached everybody and the recording has all of it, 1
//! when not, 2 when the demo could not be carried through.

use std::error::Error;
use std::process::ExitCode;

use vnplug_e2e::daemon::guest_program;
use vnplug_e2e::demo;

fn main() -> ExitCode {
    let faults = match run() {
        Ok(faults) => faults,
        Err(error) => {
            eprintln!("demo-switch: {error}");
            return ExitCode::from(2);
        }
    };
    for fault in &faults {
        eprintln!("demo-switch: FAULT: {fault}");
    }
    match faults.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn run() -> Result<Vec<String>, Box<dyn Error>> {
    let (vnplug, out) = demo::arguments("target/demo-switch")?;
    // What `make install` installs.
    let vnplug = vnplug.map_or_else(guest_program, Ok)?;
    let faults = demo::switch(&vnplug, &out)?;
    let out = out.display();
    println!(
        "\nwritten: {out}/switch.svg (open it in a browser), {out}/found.pcapng, {out}/recording"
    );
    Ok(faults)
}
