//! An operator's program before the port of a reader in C. What Python has of it is in `python/tests/test_program.py`.

use std::path::Path;
use std::process::Command;

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::third_party::{build_c, example_bpf};

#[test]
fn a_reader_in_c_has_its_packets_through_an_operators_program_and_others_have_them_as_they_were() {
    let lab = Lab::new().unwrap();
    let object = example_bpf("headers.c", lab.dir()).unwrap();
    let program = format!("headers={}", object.display());
    let source = "lab=gen,pps=5000,flows=4,size=100,protocols=udp4+udp6";
    let args = ["--source", source, "--program", &program];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/tests/c/program.c");
    let reader = build_c(&source, lab.dir(), &[]).unwrap();
    let mut command = Command::new(reader);
    let output = command.env("VNPLUG_SOCKET", daemon.socket()).output();
    let output = output.unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(output.stdout, b"done\n");
    daemon.audit();
}
