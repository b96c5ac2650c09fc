//! `--files`: which programs run.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::support::{as_nobody, figure, often, open_dir, said, sandboxed};

/// A directory with a program that ends well, one that does not, and a script.
fn programs(what: &str) -> (vnplug_testing::TestDir, [String; 3]) {
    let dir = open_dir(what);
    fs::copy("/usr/bin/true", dir.path("a")).unwrap();
    fs::copy("/usr/bin/false", dir.path("b")).unwrap();
    let script = format!("#!{}\n", dir.path("a").display());
    fs::write(dir.path("script"), script).unwrap();
    let permissions = fs::Permissions::from_mode(0o755);
    fs::set_permissions(dir.path("script"), permissions).unwrap();
    let paths = ["a", "b", "script"].map(|name| dir.path(name).to_str().unwrap().to_owned());
    (dir, paths)
}

#[test]
fn a_program_runs_where_it_is_allowed_and_its_interpreter_too() {
    let (dir, [a, b, script]) = programs("sandbox-runs");
    let run = |path: &str| format!("run={path}");
    let memory = format!("run_memory={a}");
    let words = [
        "channel",
        "run=/usr/bin/true",
        &run(&a),
        &run(&script),
        &memory,
    ];
    let text = said(&mut sandboxed(&["files"], &words));
    assert_eq!(text, "run done\nrun EACCES\nrun EACCES\nrun_memory EACCES");
    let text = said(&mut sandboxed(&["files", &a], &words));
    assert_eq!(text, "run done\nrun done\nrun EACCES\nrun_memory EACCES");
    // The script alone: what it names is a question of its own.
    let text = said(&mut sandboxed(&["files", &script], &words));
    assert_eq!(text, "run done\nrun EACCES\nrun EACCES\nrun_memory EACCES");
    let below = format!("runnable={}", dir.0.display());
    let text = said(&mut sandboxed(&["files", &below], &words));
    assert_eq!(text, "run done\nrun done\nrun done\nrun_memory EACCES");
    // What cannot be run is no question, and says what it would without us.
    let words = ["run", "files", "--", &b];
    assert_eq!(as_nobody(&words).status().unwrap().code(), Some(1));
    let missing = format!("{a}.missing");
    let words = ["run", "files", "--", &missing];
    assert_eq!(as_nobody(&words).status().unwrap().code(), Some(127));
}

#[test]
fn no_other_program_runs_than_the_one_that_was_judged_while_the_path_changes() {
    let (_dir, [a, b, _]) = programs("sandbox-run-race");
    let count = often(400, 20_000).to_string();
    let words = ["run-race", &count, &a, &b];
    let text = said(&mut sandboxed(&["files", &a], &words));
    println!("{text}");
    assert_eq!(figure(&text, "bad"), 0, "{text}");
    for kind in ["good", "refused"] {
        assert!(figure(&text, kind) > 0, "{text}");
    }
    // Where it was caught: looked up as the one, run as the other.
    assert!(figure(&text, "killed") > 0, "{text}");
    let inside = as_nobody(&[]).get_program().to_str().unwrap().to_string();
    let naive = [&["naive", "run", &b, "--", &inside][..], &words[..]].concat();
    let text = said(&mut as_nobody(&naive));
    println!("naive: {text}");
    assert!(
        figure(&text, "bad") > 0,
        "the control was not got past: {text}"
    );
}
