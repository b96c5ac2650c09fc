//! `make demo-sandbox`: a program phones a place that it should not, and the question, the denial, the frames
//! that are not there and the rule that remains are shown, in a few seconds.
//!
//!     demo-sandbox [--vnplug PROGRAM]
//!
//! Needs root, for network namespaces; the program runs as an ordinary user. Ends with 0 when all was seen that it
//! tells of, 1 when something was not, 2 when the demo could not be carried through.

use std::error::Error;
use std::process::ExitCode;

use vnplug_e2e::daemon::guest_program;
use vnplug_e2e::demo;

fn main() -> ExitCode {
    let faults = match run() {
        Ok(faults) => faults,
        Err(error) => {
            eprintln!("demo-sandbox: {error}");
            return ExitCode::from(2);
        }
    };
    for fault in &faults {
        eprintln!("demo-sandbox: FAULT: {fault}");
    }
    match faults.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn run() -> Result<Vec<String>, Box<dyn Error>> {
    let (vnplug, _) = demo::arguments("target/demo-sandbox")?;
    // What `make install` installs.
    let vnplug = vnplug.map_or_else(guest_program, Ok)?;
    let faults = demo::sandbox(&vnplug)?;
    if faults.is_empty() {
        println!(
            "\nall of it was seen: one question, no frame of what was denied, a rule, no second question"
        );
    }
    Ok(faults)
}
