//! `make demo`: what a guest captures by its own NIC and by vNPlug, in under three minutes.
//!
//! Needs root, for network namespaces. Writes `target/demo/demo.json` and `target/demo/demo.svg`.
//! Ends with 0 when vNPlug lost nothing of the real traffic, no small frame at a rate at which the NIC
//! lost none, and every packet is accounted for; 1 when not, 2 when the demo could not be carried through.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use vnplug_e2e::demo::{self, Findings};

fn main() -> ExitCode {
    let findings = match demo::run() {
        Ok(findings) => findings,
        Err(error) => {
            eprintln!("demo: {error}");
            return ExitCode::from(2);
        }
    };
    println!("\n{}", demo::table(&findings.runs));
    println!("{NOTES}\n");
    for sentence in demo::sentences(&findings.runs) {
        println!("{sentence}");
    }
    if let Err(error) = write(&findings) {
        eprintln!("demo: target/demo: {error}");
        return ExitCode::from(2);
    }
    println!("\nwritten: {DIR}/demo.json, {DIR}/demo.svg");
    for fault in &findings.faults {
        eprintln!("demo: FAULT: {fault}");
    }
    match findings.faults.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn write(findings: &Findings) -> std::io::Result<()> {
    let dir = Path::new(DIR);
    fs::create_dir_all(dir)?;
    let json = demo::to_json(&findings.runs, &findings.notes);
    fs::write(dir.join("demo.json"), format!("{json:#}\n"))?;
    fs::write(dir.join("demo.svg"), demo::svg(&findings.runs))
}

const DIR: &str = "target/demo";
const NOTES: &str = "\
CPU: processor time on the host of the guest's process and, with vNPlug, of the daemon, until all
packets were read; the generator's is not in it, nor the host kernel's work in interrupts. Small
frames have 60 bytes and are offered both ways at the same rates, for 1.5 s each, and as fast as the
generator can; it shares the machine's processors with the guest, so what was on the wire in the end
is in a column of its own: compare rows of about the same rate. The NIC's side has its best settings: UML
vector depth 128; virtio-net rx_queue_size 1024, tap queue 10,000; tcpdump with a 32 MiB buffer that
writes small frames nowhere. vNPlug: 256 MiB in the host's kernel, a ring of 128 MiB.";
