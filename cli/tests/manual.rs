//! The man pages and completions that packages ship.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use vnplug_testing::TestDir;

#[test]
fn there_is_a_page_for_each_command_and_a_completion_for_each_shell() {
    let dir = TestDir::new("manual");
    let mut manual = Command::new(env!("CARGO_BIN_EXE_vnplug"));
    let done = manual.arg("manual").arg(&dir.0).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let pages = fs::read_dir(dir.path("man/man1")).unwrap();
    let pages = pages.map(|it| it.unwrap().file_name().into_string().unwrap());
    let pages: BTreeSet<_> = pages.collect();
    let help = Command::new(env!("CARGO_BIN_EXE_vnplug"));
    let help = { help }.arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let listed = help.lines().skip_while(|it| *it != "Commands:").skip(1);
    let commands = listed.map_while(|it| it.split_whitespace().next());
    let commands: Vec<_> = commands.filter(|it| *it != "help").collect();
    assert!(commands.len() > 20, "{help}");
    for command in commands {
        assert!(pages.contains(&format!("vnplug-{command}.1")), "{command}");
    }
    assert!(pages.contains("vnplug.1") && pages.contains("vnplug-attach-qemu.1"));
    assert!(
        !pages
            .iter()
            .any(|it| it.contains("help") || it.contains("manual")),
        "{pages:?}"
    );
    for completion in ["bash/vnplug", "zsh/_vnplug", "fish/vnplug.fish"] {
        let text = fs::read_to_string(dir.path(completion)).unwrap();
        assert!(text.contains("sample"), "{completion}");
    }
}
