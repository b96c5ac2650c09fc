//! `make demo-record`: a busy wire is recorded, the recorder is killed, another goes on, and one
//! conversation is found again, in less than a minute.
//!
//!     demo-record [--vnplug PROGRAM] [--out DIR]
//!
//! Needs root, for network namespaces. Writes `conversation.pcapng` and `timeline.svg` to
//! `target/demo-record`; the recording itself is removed. Ends with 0 when nothing that was acknowledged
//! is missing, 1 when something is, 2 when the demo could not be carried through.

use std::error::Error;
use std::process::ExitCode;

use vnplug_e2e::daemon::{guest_program, program};
use vnplug_e2e::demo;

fn main() -> ExitCode {
    let faults = match run() {
        Ok(faults) => faults,
        Err(error) => {
            eprintln!("demo-record: {error}");
            return ExitCode::from(2);
        }
    };
    for fault in &faults {
        eprintln!("demo-record: FAULT: {fault}");
    }
    match faults.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn run() -> Result<Vec<String>, Box<dyn Error>> {
    let (vnplug, out) = demo::arguments("target/demo-record")?;
    // What `make install` installs.
    let vnplug = vnplug.map_or_else(guest_program, Ok)?;
    let faults = demo::record(&vnplug, &program("vnplug-web")?, &out)?;
    let out = out.display();
    println!("\nwritten: {out}/conversation.pcapng, {out}/timeline.svg (open it in a browser)");
    Ok(faults)
}
