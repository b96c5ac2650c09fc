//! The command line: help is help, and what is not understood measures nothing.

use std::process::{Command, Output};

fn bench(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug-bench"));
    command.args(words).env_remove("ROWS").env_remove("IFACE");
    // What is understood by mistake writes here, and is noticed.
    command.current_dir(env!("CARGO_TARGET_TMPDIR"));
    command.output().expect("vnplug-bench runs")
}

#[test]
fn help_names_every_row_and_exit_code() {
    for word in ["--help", "-h"] {
        let output = bench(&[word]);
        let text = String::from_utf8(output.stdout).expect("text");
        assert_eq!(
            (output.status.code(), &output.stderr[..]),
            (Some(0), &b""[..])
        );
        for part in [
            "Usage:",
            "ROUNDS=5",
            "Exit codes:",
            "\n  handoff-60 ",
            "\n  interface ",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

#[test]
fn what_is_not_understood_is_told_with_what_there_is() {
    for (words, told) in [
        (
            &["nosuch"][..],
            "no row begins with \"nosuch\"; there are\n  capture-host ",
        ),
        (&["handoff-60", "nosuch"], "no row begins with \"nosuch\""),
        (
            &["--nosuch"],
            "no such option: \"--nosuch\"; see vnplug-bench --help",
        ),
        (&["--interface"], "--interface needs a NAME"),
    ] {
        let output = bench(words);
        let text = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(2), "{words:?}: {text}");
        assert!(text.contains(told), "{words:?}: {text}");
        assert!(output.stdout.is_empty());
    }
}
