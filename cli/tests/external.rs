//! `vnplug query` becomes a program of its own, with its arguments as they are.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

fn script(path: &Path, says: &str) {
    let text = format!(
        "#!/bin/sh\nprintf '%s' {says}\nfor word; do printf ' [%s]' \"$word\"; done\nexit 7\n"
    );
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_program_beside_comes_before_that_in_path_and_gets_every_word() {
    let dir = std::env::temp_dir().join(format!("vnplug-external-{}", std::process::id()));
    let path = dir.join("path");
    fs::create_dir_all(&path).unwrap();
    let vnplug = dir.join("vnplug");
    fs::copy(env!("CARGO_BIN_EXE_vnplug"), &vnplug).unwrap();
    let ask = |words: &[&str]| {
        let mut command = Command::new(&vnplug);
        command.arg("query").args(words).env("PATH", &path);
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };

    let (code, text) = ask(&["select 1", "/data"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("neither beside vnplug nor in PATH"), "{text}");
    assert!(text.contains("make query"), "{text}");

    script(&path.join("vnplug-query"), "path");
    let words = [
        "select 'a b'",
        "/data",
        "--from",
        "-10m",
        "-o",
        "x",
        "--help",
    ];
    let all = " [select 'a b'] [/data] [--from] [-10m] [-o] [x] [--help]";
    assert_eq!(ask(&words), (Some(7), format!("path{all}")));
    script(&dir.join("vnplug-query"), "beside");
    assert_eq!(ask(&words), (Some(7), format!("beside{all}")));
    assert_eq!(ask(&["--help"]), (Some(7), "beside [--help]".into()));
    fs::remove_dir_all(&dir).unwrap();
}
