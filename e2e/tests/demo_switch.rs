//! The demo of the switch, from its beginning to its end.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::program;

#[test]
fn all_are_on_one_wire_and_it_is_captured_recorded_and_measured() {
    let lab = Lab::new().unwrap();
    let out = lab.dir().join("out");
    let began = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_demo-switch"))
        .arg("--vnplug")
        .arg(program("vnplug").unwrap())
        .arg("--out")
        .arg(&out)
        .output()
        .unwrap();
    let took = began.elapsed();
    println!("the demo took {took:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{errors}");
    // Nobody watches a longer one. Here others may have the processors, too.
    assert!(took < Duration::from_secs(300), "{took:?}");
    for words in [
        "ICMP echo request",
        "found.pcapng: ",
        "vde_switch (Debian)",
        "Mb/s",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let rows = said
        .lines()
        .filter(|line| line.ends_with(" yes") || line.ends_with(" - "));
    assert_eq!(rows.count(), 6, "{said}");
    let picture = fs::read_to_string(out.join("switch.svg")).unwrap();
    assert!(picture.contains("vnplug nic") && picture.ends_with("</svg>\n"));
    assert!(out.join("found.pcapng").is_file());
}
