//! The demo of recording, from its beginning to its end.

use std::fs;
use std::process::Command;

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::program;

#[test]
fn a_killed_recorder_kept_its_word_and_a_conversation_is_found() {
    let lab = Lab::new().unwrap();
    let out = lab.dir().join("out");
    let output = Command::new(env!("CARGO_BIN_EXE_demo-record"))
        .arg("--vnplug")
        .arg(program("vnplug").unwrap())
        .arg("--out")
        .arg(&out)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{errors}");
    for words in [
        "acknowledged: durable up to packet",
        "nothing that was acknowledged is missing",
        "GET /",
        "200 OK",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let picture = fs::read_to_string(out.join("timeline.svg")).unwrap();
    assert!(picture.contains("<svg") && picture.ends_with("</svg>\n"));
    assert!(picture.contains("rec is durable up to here"), "{picture}");
    let (before, _) = picture.split_once(" packets, ").unwrap();
    let packets: u64 = before.rsplit('>').next().unwrap().parse().unwrap();
    assert!(packets > 1000, "{packets} packets");
    assert!(out.join("conversation.pcapng").is_file());
}
