//! What the hooks make of what `vnplug` says, which is a script here.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use vnplug_e2e::Lab;
use vnplug_testing::eventually;

use super::{hook, script, set_up, succeeded};

/// A lab with such a `vnplug`, whose words go to `said`, as do the journal's.
fn played(vnplug: &str) -> Lab {
    let lab = Lab::new().unwrap();
    fs::create_dir(lab.dir().join("bin")).unwrap();
    set_up(
        &lab,
        Path::new("fake"),
        "100",
        "--guest-agent /run/100.qga\n",
    );
    script(&lab, "fake", vnplug);
    script(&lab, "logger", r#"echo "$@" >>"$LAB/said""#);
    // The machine's monitor, which nobody asks here.
    drop(UnixListener::bind(lab.dir().join("100.qmp")).unwrap());
    lab
}

/// As Proxmox or libvirt calls it; what it says itself.
fn call(lab: &Lab, file: &str, words: &[&str], env: &[(&str, &str)]) -> String {
    let mut hook = hook(lab, file);
    hook.env("LAB", lab.dir()).envs(env.iter().copied());
    succeeded(&hook.args(words).output().unwrap())
}

fn said(lab: &Lab) -> String {
    fs::read_to_string(lab.dir().join("said")).unwrap_or_default()
}

/// A daemon that is not told that a machine is gone keeps its memory: somebody has to know.
#[test]
fn a_release_that_fails_is_told_and_one_that_was_done_before_is_not() {
    let lab = played(r#"echo "$SAYS" >&2; exit "$CODE""#);
    let file = lab.dir().join("vms/100");
    fs::write(file, "--name \"it's one\"\n").unwrap();
    let told = |says: &str, code: &str| {
        let env = [("SAYS", says), ("CODE", code)];
        call(&lab, "libvirt-hook", &["100", "release", "end", "-"], &env);
        call(&lab, "proxmox-hook", &["100", "post-stop"], &env);
        let told = said(&lab);
        let _ = fs::remove_file(lab.dir().join("said"));
        told
    };
    let away = told("vnplug: nobody listens", "1");
    let complaints = away.matches("not forgotten: vnplug: nobody listens");
    assert_eq!(complaints.count(), 2, "{away}");
    // What is to be typed then, unless it runs again.
    for typed in [
        r"vnplug detach qemu --qmp /nonexistent --name 'it'\''s one' --gone",
        "proxmox-hook' 100 post-stop",
    ] {
        assert!(away.contains(typed), "{away}");
    }
    assert_eq!(away.matches("If it does not run again: ").count(), 2);
    assert_eq!(told("", "0"), "");
}

/// It does not answer at once; who waits longer begins, and ends when the test says so.
const STARTS_SLOWLY: &str = r#"case $* in
*'--guest-wait 0s') echo '100: attached'; echo 'no answer yet' >&2; exit 8 ;;
attach*)
    echo "$@" >>"$LAB/said"
    echo $$ >"$LAB/waits"
    until [ -e "$LAB/answers" ]; do sleep 0.02; done
    echo 'pushed' ;;
*) echo "$@" >>"$LAB/said" ;;
esac"#;

/// Whether a process has not ended.
fn runs(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    // Behind the name in brackets.
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// A guest has no agent before it has started, and nobody who starts it waits for that.
#[test]
fn a_guest_that_starts_slowly_is_waited_for_and_not_by_who_starts_it() {
    let lab = played(STARTS_SLOWLY);
    let answers = lab.dir().join("answers");
    let waits = || fs::read_to_string(lab.dir().join("waits")).unwrap_or_default();
    let start = |file: &str| {
        let words: &[&str] = match file {
            "proxmox-hook" => &["100", "post-start"],
            _ => &["100", "started", "begin", "-"],
        };
        let told = call(&lab, file, words, &[]);
        eventually("it goes on in the background", || waits().ends_with('\n'));
        told
    };
    for file in ["proxmox-hook", "libvirt-hook"] {
        let told = start(file);
        if file == "proxmox-hook" {
            let words = "100: attached\nno answer yet; the guest is waited for in the background";
            assert!(told.contains(words), "{told}");
        }
        assert!(said(&lab).contains("--guest-wait 5m"), "{}", said(&lab));
        fs::write(&answers, "").unwrap();
        eventually("it is done", || said(&lab).contains("100: pushed"));
        for file in ["answers", "waits", "said"] {
            fs::remove_file(lab.dir().join(file)).unwrap();
        }
    }
    // A machine that is to stop, or to move, is not plugged into any more.
    for phase in ["pre-stop", "post-stop", "post-start"] {
        start("proxmox-hook");
        let pid = waits();
        assert!(runs(&pid));
        fs::remove_file(lab.dir().join("waits")).unwrap();
        call(&lab, "proxmox-hook", &["100", phase], &[]);
        eventually("it ends", || !runs(&pid));
        let detached = said(&lab).contains("detach qemu");
        assert_eq!(detached, phase != "post-start", "{}", said(&lab));
        // The control: one that still ran would say so now. After post-start another one waits.
        if phase != "post-start" {
            fs::write(&answers, "").unwrap();
            std::thread::sleep(Duration::from_millis(200));
            assert!(!said(&lab).contains("pushed"), "{phase}: {}", said(&lab));
            fs::remove_file(&answers).unwrap();
        }
        let _ = fs::remove_file(lab.dir().join("said"));
    }
    call(&lab, "proxmox-hook", &["100", "post-stop"], &[]);
}

/// What is attached is not attached again because its guest does not take the agent.
#[test]
fn what_cannot_be_put_into_a_guest_is_told_once_and_what_cannot_be_attached_is_tried_again() {
    let lab = played(r#"echo "$@" >>"$LAB/tries"; echo "ends with $CODE"; exit "$CODE""#);
    for (file, words) in [
        ("libvirt-hook", &["100", "started", "begin", "-"][..]),
        ("proxmox-hook", &["100", "in-background"]),
    ] {
        for (code, tries) in [("0", 1), ("7", 1), ("8", 1), ("1", 5)] {
            call(&lab, file, words, &[("CODE", code)]);
            let ends = format!("ends with {code}");
            eventually("it gives up", || said(&lab).contains(&ends));
            let made = fs::read_to_string(lab.dir().join("tries")).unwrap();
            // libvirt's begins without waiting for the guest.
            let tries = tries + usize::from(file == "libvirt-hook" && code == "8");
            assert_eq!(made.lines().count(), tries, "{file} {code}: {made}");
            let failed = said(&lab).contains("not attached");
            assert_eq!(failed, code == "1", "{}", said(&lab));
            for file in ["tries", "said"] {
                fs::remove_file(lab.dir().join(file)).unwrap();
            }
        }
    }
}
