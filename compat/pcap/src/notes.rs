//! Lines on stderr: what a program's user has to know and the program does not tell.
//!
//! Some programs ask the kernel about the device and say nothing when it does not know it; then they
//! cannot work, and nobody learns why. These calls do not come to libpcap, so which programs they are
//! is a table, found by trying them.

use std::path::Path;
use std::sync::Once;

use crate::devices::device_of;

/// Writes a line, once for each `once`, unless `VNPLUG_QUIET` says that nobody wants any.
pub(crate) fn note(once: &Once, text: &str) {
    once.call_once(|| {
        if std::env::var_os("VNPLUG_QUIET").is_none_or(|value| value.is_empty()) {
            eprintln!("{text}");
        }
    });
}

/// A program opens a device, of ours or not: says so if it will fail without a word.
pub(crate) fn opens(device: &str) {
    static ONCE: Once = Once::new();
    if ONCE.is_completed() {
        return;
    }
    let args: Vec<String> = std::env::args_os()
        .map(|arg| arg.to_string_lossy().into_owned())
        .collect();
    if let Some(text) = warning(&args, device) {
        note(&ONCE, &text);
    }
}

/// What to say of a program with these arguments, its own path among them.
fn warning(args: &[String], device: &str) -> Option<String> {
    let (path, args) = args.split_first()?;
    let name = Path::new(path).file_name()?.to_str()?;
    let (_, what, instead) = SILENT.iter().find(|program| program.0 == name)?;
    // It may have taken another one, as the kernel does not know ours.
    let asked = args.iter().map(String::as_str).chain([device]);
    let ours = asked.into_iter().find(|name| device_of(name).is_some())?;
    Some(format!(
        "vnplug: {name} {what}, and the kernel does not know {ours}: {instead} \
         (VNPLUG_QUIET=1 silences this)"
    ))
}

/// Name, what it asks the kernel, what to do instead. docs/applications.md lists them, too.
const SILENT: [(&str, &str, &str); 3] = [
    (
        "knockd",
        "looks up the addresses of its device, without which no knock matches",
        "give it an interface with addresses, as of `vnplug tap`",
    ),
    (
        "hping3",
        "sends and listens on an interface of the kernel's, here another one",
        "give it the interface itself",
    ),
    (
        "argus",
        "asks whether its device is up, and ends if it is not",
        "give it an interface of `vnplug tap`",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn said(args: &[&str], device: &str) -> Option<String> {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        warning(&args, device)
    }

    #[test]
    fn who_fails_without_a_word_is_named_with_the_device() {
        for (args, device) in [
            (&["/usr/sbin/knockd", "-i", "vnplug:w0"][..], "vnplug:w0"),
            (&["knockd", "-c", "file"], "vnplug:w0"),
            (&["hping3", "-I", "vnplug:w0", "-S"], "lo"),
            (&["argus", "-i", "host:w0"], "host:w0"),
        ] {
            let text = said(args, device).unwrap();
            assert!(text.contains(":w0: "), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn others_and_real_devices_are_left_alone() {
        assert_eq!(said(&["tcpdump", "-i", "vnplug:w0"], "vnplug:w0"), None);
        assert_eq!(said(&["hping3", "-I", "eth0"], "eth0"), None);
        assert_eq!(said(&["argus", "-i", "host:"], "eth0"), None);
        assert_eq!(said(&[], "vnplug:w0"), None);
    }
}
