//! The demo of the sandbox, from its beginning to its end.

use std::process::Command;

use vnplug_e2e::daemon::program;

#[test]
fn what_is_denied_has_no_frame_and_a_rule_remains() {
    let output = Command::new(env!("CARGO_BIN_EXE_demo-sandbox"))
        .arg("--vnplug")
        .arg(program("vnplug").unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{errors}");
    for words in [
        "question 1: curl",
        "0 frames of it on its wire, 0 messages collected",
        "answers:1",
        "1 messages collected",
        "all of it was seen",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}
