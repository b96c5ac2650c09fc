//! Names in the directory of a switch for programs of VDE, where others than the switch make them: links, sockets of
//! other users, and names that change while somebody joins. As root, for the parts with several users.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use vnplug_testing::{TestDir, eventually};

use self::clients::{Client, Vde, ask, bound};
use self::served::{ALL, frame};

#[expect(dead_code, reason = "for tests that change settings")]
mod clients;
#[expect(dead_code, reason = "for tests that look at what is captured")]
mod served;

#[test]
fn paths_that_are_not_the_clients_are_refused() {
    let switch = Vde::here(|_| {});
    let dir = switch.dir.clone();
    let aside = TestDir::new("vde-aside");
    let elsewhere = bound(&aside.path("sock"));
    let file = dir.join(".file");
    std::fs::write(&file, "").unwrap();
    let link = dir.join(".link");
    symlink(aside.path("sock"), &link).unwrap();
    let stream = dir.join(".stream");
    let _listener = UnixListener::bind(&stream).unwrap();
    for path in [
        aside.path("sock"),
        file,
        link,
        stream,
        dir.join("nothing"),
        dir.join("../").join(dir.file_name().unwrap()).join(".file"),
        "/run/systemd/notify".into(),
        "/".into(),
    ] {
        assert!(ask(&dir, &path).is_none(), "{}", path.display());
    }
    drop(elsewhere);
    let mut garbage = UnixStream::connect(dir.join("ctl")).unwrap();
    garbage.write_all(&[0x55; 300]).unwrap();
    let mut answer = Vec::new();
    // Closed, be it with bytes unread.
    let _ = garbage.read_to_end(&mut answer);
    assert!(answer.is_empty());
    Client::join(&dir);
}

#[test]
fn another_users_socket_is_refused_and_its_own_is_not() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: becomes other users, which takes root");
    }
    let switch = Vde::here(|_| {});
    let dir = switch.dir.clone();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
    let path = |name: &str| dir.join(name);
    let victim = bound(&path(".victim"));
    let own = bound(&path(".own"));
    for (name, uid) in [(".victim", 4001), (".own", 4002)] {
        std::fs::set_permissions(path(name), std::fs::Permissions::from_mode(0o777)).unwrap();
        chown(path(name), Some(uid), None).unwrap();
    }
    let (victims, owns, at) = (path(".victim"), path(".own"), dir.clone());
    let answers = std::thread::spawn(move || {
        let uid = rustix::process::Uid::from_raw(4002);
        rustix::thread::set_thread_uid(uid).unwrap();
        (ask(&at, &victims).is_some(), ask(&at, &owns))
    });
    let (victims, owns) = answers.join().unwrap();
    assert!(!victims, "the switch would write to another user's socket");
    let (_ctl, theirs) = owns.unwrap();
    // Nobody but the client can send to its port.
    let stranger = UnixDatagram::unbound().unwrap();
    let sent = stranger.send_to(&frame(ALL, 3, 0, 60), &theirs);
    assert_eq!(sent.unwrap_err().kind(), ErrorKind::PermissionDenied);
    own.connect(theirs).unwrap();
    own.send(&frame(ALL, 3, 0, 60)).unwrap();
    eventually("it was heard", || switch.count("entered") == 1);
    drop(victim);
}

#[test]
fn who_may_join_cannot_take_the_switchs_socket_away_nor_anothers() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: becomes other users, which takes root");
    }
    let switch = Vde::here(|config| config.vde.as_mut().unwrap().mode = 0o666);
    let dir = switch.dir.clone();
    let as_user = |uid: u32, what: fn(&Path) -> Vec<ErrorKind>| {
        let dir = dir.clone();
        let done = std::thread::spawn(move || {
            let uid = rustix::process::Uid::from_raw(uid);
            rustix::thread::set_thread_uid(uid).unwrap();
            what(&dir)
        });
        done.join().unwrap()
    };
    // Whose client joins, and whose files come and go as libvdeplug has them.
    let joins = |dir: &Path| {
        let [one, other] = [0; 2].map(|_| Client::join(dir));
        one.send(&frame(ALL, 1, 0, 60));
        assert_eq!(other.next(), frame(ALL, 1, 0, 60));
        drop((one, other));
        let path = dir.join(".mine");
        drop(bound(&path));
        let gone = std::fs::remove_file(path);
        gone.err().map(|error| error.kind()).into_iter().collect()
    };
    let takes = |dir: &Path| {
        let tries = [
            std::fs::remove_file(dir.join("ctl")),
            std::fs::rename(dir.join("ctl"), dir.join("old")),
            std::fs::remove_file(dir.join(".theirs")),
        ];
        let errors = tries.into_iter().filter_map(Result::err);
        errors.map(|error| error.kind()).collect()
    };
    let _theirs = as_user(4001, |dir| {
        std::mem::forget(bound(&dir.join(".theirs")));
        Vec::new()
    });
    assert_eq!(as_user(4002, takes), [ErrorKind::PermissionDenied; 3]);
    for uid in [4001, 4002] {
        assert_eq!(as_user(uid, joins), []);
    }
    // Also our own sockets for them are gone with them.
    eventually("ctl and the other's are left", || {
        std::fs::read_dir(&dir).unwrap().count() == 2
    });
}

/// What a user tries with names in the switch's directory while one of his programs asks to join.
struct Game {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Game {
    /// Puts these under one name in turns, as this user: his own socket, and links to what is not his.
    fn play(uid: u32, name: PathBuf, own: PathBuf, others: Vec<PathBuf>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            become_user(uid);
            let aside = name.with_extension("aside");
            for victim in others.iter().cycle() {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let _ = std::fs::remove_file(&aside);
                let put = symlink(victim, &aside).and_then(|()| std::fs::rename(&aside, &name));
                // What his name is for a moment, again and again.
                let _ = put.and_then(|()| std::fs::hard_link(&own, &aside));
                let _ = std::fs::rename(&aside, &name);
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Game {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn become_user(uid: u32) {
    let uid = rustix::process::Uid::from_raw(uid);
    rustix::thread::set_thread_uid(uid).unwrap();
}

/// All of a file that a switch could change: owner, group, permission bits, and when the last of them changed.
fn state(path: &Path) -> (u64, u32, u32, u32, i64, i64) {
    let it = std::fs::symlink_metadata(path).unwrap();
    let changed = (it.ctime(), it.ctime_nsec());
    (
        it.ino(),
        it.uid(),
        it.gid(),
        it.mode(),
        changed.0,
        changed.1,
    )
}

/// A switch without sense: looks whose socket it is, and then takes what lies at that name by now.
fn joined_without_care(path: &Path, uid: u32) -> Option<UnixDatagram> {
    let found = std::fs::symlink_metadata(path).ok()?;
    let is_his = found.file_type().is_socket() && found.uid() == uid;
    let ours = is_his.then(|| UnixDatagram::unbound().unwrap())?;
    // It does something else first.
    std::thread::yield_now();
    ours.set_nonblocking(true).unwrap();
    ours.connect(path).ok()?;
    Some(ours)
}

#[test]
fn names_that_change_while_a_program_joins_lead_to_nothing_of_others() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: becomes other users, which takes root");
    }
    const LIAR: u32 = 4002;
    let tries = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 10_000,
        None => 2000,
    };
    // With a directory that keeps others' names, and one in which anybody may take away anything.
    for dir_mode in [0o1777, 0o777] {
        let switch = Vde::here(|config| {
            config.vde.as_mut().unwrap().dir_mode = Some(dir_mode);
        });
        let dir = switch.dir.clone();
        let aside = TestDir::new("vde-aside");
        let (target, guarded) = (aside.path("victim"), aside.path("file"));
        let victim = bound(&target);
        victim.set_nonblocking(true).unwrap();
        std::fs::write(&guarded, "mine").unwrap();
        for (path, uid, mode) in [(&target, 4001, 0o777), (&guarded, 0, 0o600)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
            chown(path, Some(uid), None).unwrap();
        }
        let before = [&target, &guarded].map(|path| state(path));
        // Every port is given something without end: whoever is joined in the victim's name writes to it.
        let station = Client::join(&dir);
        let (own, name) = (dir.join(".own"), dir.join(".name"));
        let place = own.clone();
        let heard = std::thread::spawn(move || {
            become_user(LIAR);
            bound(&place)
        });
        let heard = heard.join().unwrap();
        heard.set_nonblocking(true).unwrap();
        let others = vec![target.clone(), guarded.clone(), dir.join("ctl")];
        // Some names that the switch would give its own sockets are links to others' already.
        let mut planted = Vec::new();
        for port in 1..4 {
            for fd in (0..64).step_by(3) {
                planted.push(dir.join(format!("{port:03}.{fd}")));
            }
        }
        planted.retain(|name| symlink(&guarded, name).is_ok());
        let game = Game::play(LIAR, name.clone(), own.clone(), others);
        let (at, path) = (dir.clone(), name.clone());
        let asking = std::thread::spawn(move || {
            become_user(LIAR);
            (0..tries).filter(|_| ask(&at, &path).is_some()).count()
        });
        let mut number = 0;
        while !asking.is_finished() {
            station.send(&frame(ALL, 1, number, 60));
            number += 1;
            std::thread::sleep(Duration::from_micros(200));
        }
        let joined = asking.join().unwrap();
        let led = victim.recv(&mut [0; 100]);
        assert!(
            led.is_err(),
            "{joined} of {tries} joined, and one at the victim's socket"
        );
        assert!(joined > 0, "the game is none if nobody ever joins");
        let after = [&target, &guarded].map(|path| state(path));
        assert_eq!(after, before, "what is not his is as it was");
        assert_eq!(std::fs::read(&guarded).unwrap(), b"mine");
        eprintln!("{dir_mode:o}: {joined} of {tries} joined, by his own socket");
        // The control: the same game against who looks and takes by name. In the other directory the kernel keeps
        // even him from links of others (`fs.protected_symlinks`).
        if dir_mode == 0o777 {
            eventually("who takes no care is fooled", || {
                let ours = joined_without_care(&name, LIAR);
                ours.is_some_and(|ours| ours.send(b"a frame").is_ok())
                    && victim.recv(&mut [0; 100]).is_ok()
            });
        }
        drop(game);
        for name in planted {
            std::fs::remove_file(name).unwrap();
        }
        // And others join as ever.
        let other = Client::join(&dir);
        eventually("it is heard", || {
            other.send(&frame(ALL, 2, 0, 60));
            !station.has_nothing()
        });
        switch.check_sums();
    }
}
