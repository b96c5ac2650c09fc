//! Files of rules: read strictly, edited without loss.

use super::*;

#[test]
fn a_file_of_rules_is_a_file_with_an_end() {
    let dir = TestDir::new("sandbox-rules-file");
    let fifo = dir.path("fifo");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let zero = dir.path("zero");
    std::os::unix::fs::symlink("/dev/zero", &zero).unwrap();
    for path in [fifo.as_path(), &zero, &dir.0] {
        let error = file::read(path).unwrap_err().to_string();
        assert!(
            error.ends_with("a file of rules must be a regular file"),
            "{error}"
        );
    }
    let long = dir.path("long");
    std::fs::File::create(&long)
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let error = file::read(&long).unwrap_err().to_string();
    assert!(error.contains("has at most 4194304 bytes"), "{error}");
    assert!(file::read(&dir.path("none")).unwrap().rules.is_empty());
}

#[test]
fn what_is_wrong_in_a_file_is_said_with_its_line_and_what_to_do() {
    for (text, line, what) in [
        ("[[rule]]\nsay = 'alow'\n", 2, "allow, ask or deny"),
        ("\n[[rule]]\nprogram = '/bin/x'\n", 2, "add say"),
        (
            "[[rule]]\nsay = 'allow'\nprogramm = '/bin/x'\n",
            3,
            "no key of a rule",
        ),
        (
            "[[rule]]\nsay = 'allow'\nprogram = 'curl'\n",
            3,
            "whole path",
        ),
        (
            "[[rule]]\nsay = 'allow'\nto = 'http://x.org'\n",
            3,
            "write example.org",
        ),
        (
            "[[rule]]\nsay = 'allow'\nto = []\n",
            3,
            "leave the key away",
        ),
        ("[[rule]]\nsay = 'allow'\nto = 3\n", 3, "text in quotes"),
        (
            "[[rule]]\nsay = 'allow'\nport = 70000\n",
            3,
            "443 or 8000-8999",
        ),
        ("[[rule]]\nsay = 'allow'\nport = true\n", 3, "443"),
        (
            "[[rule]]\nsay = 'allow'\nuntil = 2026-01-01\n",
            3,
            "with its zone",
        ),
        (
            "[[rule]]\nsay = 'allow'\nuntil = 2026-01-01T00:00:00\n",
            3,
            "with its zone",
        ),
        (
            "[[rule]]\nsay = 'allow'\nlocal = true\n",
            1,
            "local is for rules with names",
        ),
        (
            "[[rule]]\nsay = 'allow'\nprotocol = 'packet'\nport = 1\n",
            1,
            "leave to and port away",
        ),
        (
            "[[rule]]\nsay = 'allow'\nto = 'file:/tmp'\n",
            1,
            "direction",
        ),
        (
            "[[rule]]\nsay = 'allow'\ndirection = 'listen'\nto = 'a.org'\n",
            1,
            "write addresses",
        ),
        ("# x\n[rule]\nsay = 'allow'\n", 2, "double brackets"),
        ("defaults = 'ask'\n", 1, "no key of a file"),
        ("default = 'ask'\ndefault = 'deny'\n", 2, "no TOML"),
        ("timeout = 'soon'\n", 1, "timeout"),
        ("[[rule]\n", 1, "no TOML"),
    ] {
        let error = parse(text, |line, _| {
            Origin::File(Arc::new("f.toml".into()), line)
        })
        .unwrap_err()
        .to_string();
        assert!(
            error.starts_with(&format!("f.toml:{line}: ")) && error.contains(what),
            "{text:?}: {error}"
        );
    }
}

#[test]
fn a_rule_is_written_as_it_is_read() {
    let text = "[[rule]]\nsay = \"ask\"\nprogram = \"/opt/a \\\"b\\\"\"\nsha256 = \"abababababababababababababababababababababababababababababababab\"\n\
        arguments = \"x *\"\nparent = \"**/make\"\nprotocol = [\"tcp\", \"ip:132\"]\nto = [\"*.example.org\", \"192.0.2.0/24\", \"private\"]\n\
        port = [443, \"8000-8999\"]\nlocal = true\nuntil = 2030-02-28T23:59:59Z\nnote = \"a \\u0007 b\"\n";
    assert_eq!(
        file::parse(&edit::write(&rules(text)[0]), |_, _| Origin::Given)
            .unwrap()
            .rules
            .len(),
        1
    );
    let again = rules(&edit::write(&rules(text)[0]));
    assert_eq!(again, rules(text));
}

#[test]
fn a_machines_edit_keeps_what_people_wrote() {
    let dir = TestDir::new("sandbox-rules-edit");
    let path = dir.path("a.toml");
    let hand = "# My rules.\ndefault   =   'ask'  # not allow\n\n# Git talks to our server.\n[[rule]]\nsay='allow' # yes\n\
                program = \"/usr/bin/git\"\n\n# Nothing else does.\n[[rule]]\nsay = 'deny'\n# the end";
    std::fs::write(&path, hand).unwrap();
    let mut rule = Rule::new(Say::Allow);
    rule.to = vec!["example.org".parse().unwrap()];
    edit::add(&path, &rule, Where::Last).unwrap();
    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    assert_eq!(
        text(&path),
        format!("{hand}\n\n[[rule]]\nsay = \"allow\"\nto = \"example.org\"\n")
    );
    edit::add(&path, &rule, Where::First).unwrap();
    assert!(
        text(&path).contains(
            "# not allow\n\n[[rule]]\nsay = \"allow\"\nto = \"example.org\"\n\n# Git talks"
        )
    );
    assert_eq!(file::read(&path).unwrap().rules.len(), 4);

    let removed = edit::remove(&path, 2).unwrap();
    assert_eq!(
        removed.program.as_ref().unwrap().to_string(),
        "/usr/bin/git"
    );
    let left = text(&path);
    assert!(
        !left.contains("git") && left.contains("# My rules.\ndefault   =   'ask'  # not allow"),
        "{left}"
    );
    assert!(
        left.contains("# Nothing else does.\n[[rule]]\nsay = 'deny'\n"),
        "{left}"
    );
    assert!(
        edit::remove(&path, 9)
            .unwrap_err()
            .to_string()
            .contains("there is no rule 9, but 3")
    );

    // A file with errors is left alone, and no part of a file is left behind.
    std::fs::write(&path, "[[rule]]\nsay = 'perhaps'\n").unwrap();
    assert!(edit::add(&path, &rule, Where::Last).is_err());
    assert_eq!(text(&path), "[[rule]]\nsay = 'perhaps'\n");
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 1);
    // A file that is not there is made, with the directories above it.
    let new = dir.path("x/y/b.toml");
    edit::add(&new, &rule, Where::First).unwrap();
    assert_eq!(file::read(&new).unwrap().rules.len(), 1);
}

#[test]
fn two_who_edit_at_once_lose_nothing() {
    let dir = TestDir::new("sandbox-rules-race");
    let path = dir.path("a.toml");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10 {
                    edit::add(&path, &Rule::new(Say::Deny), Where::Last).unwrap();
                }
            });
        }
    });
    assert_eq!(file::read(&path).unwrap().rules.len(), 40);
}
