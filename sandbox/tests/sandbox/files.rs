//! `--files`: files are changed where it is allowed, on what was judged.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::support::{open_dir, said, sandboxed};

#[test]
fn files_are_changed_in_directories_that_were_given_and_asked_about_elsewhere() {
    let dir = open_dir("sandbox-files");
    let base = dir.0.to_str().unwrap();
    for name in ["free", "kept"] {
        fs::create_dir(dir.path(name)).unwrap();
        fs::set_permissions(dir.path(name), PermissionsExt::from_mode(0o777)).unwrap();
    }
    fs::write(dir.path("kept/old"), "old\n").unwrap();
    fs::set_permissions(dir.path("kept/old"), PermissionsExt::from_mode(0o666)).unwrap();
    let attempts = [
        "write=B/free/new",
        "append=B/free/new",
        "rename=B/free/new:B/free/other",
        "mkdir=B/free/directory",
        "rmdir=B/free/directory",
        "read=B/kept/old",
        "write=B/kept/old",
        "write=B/kept/new",
        "append=B/free/../kept/old",
        "unlink=B/kept/old",
        "rename=B/kept/old:B/free/old",
        "rename=B/free/other:B/kept/other",
        "mkdir=B/kept/directory",
        "link=B/kept/old:B/free/link",
        "symlink=B/kept/old:B/free/symlink",
        "append=B/free/symlink",
        "write=/dev/null",
    ];
    let attempts = attempts.map(|attempt| attempt.replace('B', base));
    let words: Vec<&str> = ["channel"]
        .into_iter()
        .chain(attempts.iter().map(|it| &it[..]))
        .collect();
    let free = format!("writable={base}/free");
    let expected = "write done\nappend done\nrename done\nmkdir done\nrmdir done\nread done\n\
        write EACCES\nwrite EACCES\nappend EACCES\nunlink EACCES\nrename EACCES\nrename EACCES\n\
        mkdir EACCES\nlink EACCES\nsymlink done\nappend EACCES\nwrite done";
    assert_eq!(said(&mut sandboxed(&[&free], &words)), expected);
    assert_eq!(
        fs::read_to_string(dir.path("free/other")).unwrap(),
        "written\nmore\n"
    );
    assert_eq!(fs::read_to_string(dir.path("kept/old")).unwrap(), "old\n");

    // A file that is allowed by name, also by way of a link, and nothing beside it.
    let old = format!("{base}/kept/old");
    let words = ["channel", &attempts[6], &attempts[15], &attempts[7]];
    let text = said(&mut sandboxed(&[&free, &old], &words));
    assert_eq!(text, "write done\nappend done\nwrite EACCES");
    assert_eq!(fs::read_to_string(&old).unwrap(), "written\nmore\n");
}

#[test]
fn processes_are_no_files_whatever_is_allowed() {
    let words = ["channel", "append=/proc/self/comm", "append=/dev/null"];
    let text = said(&mut sandboxed(&["writable=/"], &words));
    assert_eq!(text, "append EACCES\nappend done");
}

#[test]
fn a_shell_writes_its_redirections_as_files() {
    let dir = open_dir("sandbox-shell");
    let path = dir.path("file");
    let script = format!("umask 027; echo yes > {0}; cat {0}", path.display());
    let mut command = crate::support::as_nobody(&[
        "run",
        "files",
        path.to_str().unwrap(),
        "--",
        "/bin/sh",
        "-c",
        &script,
    ]);
    assert_eq!(said(&mut command), "yes");
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o640
    );
    let script = format!("echo no > {}", dir.path("other").display());
    let mut command = crate::support::as_nobody(&["run", "files", "--", "/bin/sh", "-c", &script]);
    command.stderr(std::process::Stdio::null());
    assert!(!command.status().unwrap().success());
    assert!(!dir.path("other").exists());
}
