//! C programs, compiled against our header and library, and how to run them.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use vnplug_testing::{PATIENCE, until};

/// Which form of the library a program is linked with.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Library {
    /// libpfring.so, a copy beside the program.
    Shared,
    /// libpfring.a, and everything else static too.
    Static,
}

/// Where cargo put the libraries: beside the test's binary.
pub(crate) fn library_dir() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let dir = test.parent().unwrap();
    assert!(dir.join("libpfring.so").exists() && dir.join("libpfring.a").exists());
    dir.to_owned()
}

/// The file of this package.
pub(crate) fn here(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Compiles `tests/c/NAME.c` to a program in `dir`.
pub(crate) fn compile(dir: &Path, name: &str, library: Library) -> PathBuf {
    let (program, libraries) = (dir.join(name), library_dir());
    let mut compiler = Command::new("cc");
    compiler.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]);
    compiler.arg("-Wno-address-of-packed-member");
    compiler.arg("-I").arg(here("include"));
    compiler.arg(here("tests/c").join(format!("{name}.c")));
    compiler.arg("-o").arg(&program);
    match library {
        Library::Shared => {
            // A copy without debug information, so that it fits a guest's file system.
            let mut strip = Command::new("strip");
            strip.arg("-o").arg(dir.join("libpfring.so"));
            strip.arg(libraries.join("libpfring.so"));
            assert!(strip.status().unwrap().success());
            let place = dir.display();
            compiler.arg(format!("-L{place}"));
            compiler.arg(format!("-Wl,--disable-new-dtags,-rpath,{place}"));
            compiler.args(["-lpfring", "-lpthread"]);
        }
        Library::Static => {
            compiler.args(["-static", "-s"]);
            compiler.arg(libraries.join("libpfring.a"));
            compiler.args(["-lpthread", "-ldl", "-lm"]);
        }
    }
    assert!(compiler.status().unwrap().success(), "{name}.c");
    program
}

/// A program that runs; killed when dropped.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Running {
    /// Starts a program against the daemon at `socket`.
    pub(crate) fn start(program: &Path, socket: &Path, args: &[&str]) -> Self {
        Self::of(Command::new(program), socket, args)
    }

    /// Starts a command against the daemon at `socket`.
    pub(crate) fn of(mut command: Command, socket: &Path, args: &[&str]) -> Self {
        let mut child = command
            .args(args)
            .env("VNPLUG_SOCKET", socket)
            // Cargo's own would find another libpfring.so first.
            .env_remove("LD_LIBRARY_PATH")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        Self {
            child,
            input,
            lines,
        }
    }

    /// Has one that was told to wait for a line of input go on.
    pub(crate) fn go(&mut self) {
        self.input.write_all(b"\n").unwrap();
    }

    /// The next line it prints.
    pub(crate) fn line(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("another line")
    }

    /// Waits for a line.
    pub(crate) fn expect(&self, line: &str) {
        assert_eq!(self.line(), line);
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(sent.unwrap().success());
    }

    /// Waits for its end; it must succeed.
    pub(crate) fn finish(mut self) {
        let wait = || self.child.try_wait().unwrap();
        let status = until("it ends", wait, Option::is_some).unwrap();
        let left: Vec<String> = self.lines.iter().collect();
        assert!(status.success(), "{status}: {left:?}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _over_already = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// A number of a line of results: `… NAME NUMBER …`.
pub(crate) fn number(line: &str, name: &str) -> u64 {
    let mut words = line.split_whitespace();
    let found = words.find(|word| *word == name).and_then(|_| words.next());
    let found = found.unwrap_or_else(|| panic!("no {name} in {line:?}"));
    found
        .parse()
        .unwrap_or_else(|_| panic!("{name} in {line:?}"))
}

/// All text of a command's output.
pub(crate) fn text_of(command: &mut Command) -> String {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert!(child.wait().unwrap().success());
    text
}
