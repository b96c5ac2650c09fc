//! Object files of operators' programs (`--program FILE.o`): whatever they are, they are read or refused with a reason, and
//! what is accepted fits together. Nothing is given to the kernel.

use std::panic::{catch_unwind, set_hook};
use std::sync::{Mutex, Once};

use vnplug_os::bpf::Insn;
use vnplug_twin::{Code, MapKind, Object, SharedMap};

/// What was said of the last panic.
static SAID: Mutex<String> = Mutex::new(String::new());
/// The most memory that all maps of an object have.
const MOST: u64 = 256 << 20;

/// Checks it with these bytes: an object file.
pub fn check(bytes: &[u8]) {
    static ONCE: Once = Once::new();
    // The reader of objects is a third party's, and may panic: that is caught where it is called, and libFuzzer's own hook
    // would end the process before. One of ours is a finding.
    ONCE.call_once(|| {
        set_hook(Box::new(|panic| {
            if let Ok(mut said) = SAID.lock() {
                *said = panic.to_string();
            }
        }));
    });
    if catch_unwind(|| judge(bytes)).is_err() {
        let said = SAID.lock().map(|it| it.clone()).unwrap_or_default();
        eprintln!("thread 'main' {said}\n");
        std::process::abort();
    }
}

fn judge(bytes: &[u8]) {
    let object = match Object::parse(bytes, None) {
        Ok(object) => object,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            // One that has several is read when one of them is named, and then that one is it.
            if let Ok(named) = Object::parse(bytes, Some("first")) {
                assert_eq!(named.name(), "first");
            }
            return;
        }
    };
    let again = Object::parse(bytes, Some(object.name()));
    let again = again.unwrap_or_else(|error| panic!("it is refused by its own name: {error}"));
    assert_eq!(again.name(), object.name());
    assert_eq!(
        (again.context, again.maps.len()),
        (object.context, object.maps.len())
    );
    let mut all = 0;
    for map in &object.maps {
        assert!(map.value_bytes > 0 && map.entries > 0, "{map:?}");
        assert!(map.data.len() <= map.value_bytes as usize, "{map:?}");
        assert!(!map.constant || map.kind == MapKind::Array, "{map:?}");
        all += u64::from(map.value_bytes) * u64::from(map.entries);
    }
    assert!(all <= MOST, "{:?}", object.maps);
    assert!(
        object.maps.is_sorted_by(|a, b| a.name < b.name),
        "each name once"
    );
    let _ = object.license();
    // Maps have numbers as descriptors have; one that has none is not known.
    let number = |name: &str| {
        let at = object.maps.iter().position(|it| it.name == name);
        at.map(|at| FIRST + at as i32)
    };
    let Ok(insns) = object.link(number) else {
        return;
    };
    let _ = object.link(|_| None);
    translate(&object, &insns);
}

/// What the daemon would run, if the kernel accepted it: of objects without maps, whose memory the kernel makes.
fn translate(object: &Object, insns: &[Insn]) {
    if object.maps.is_empty() {
        let none: Vec<SharedMap> = Vec::new();
        let _ = Code::new(insns, object.context, none);
    }
}

/// The number of the first map.
const FIRST: i32 = 100;
