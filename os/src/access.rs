//! Access lists of files (acl(5)): which users, beside its owner and its group, may open one.

use std::io;
use std::path::Path;

use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};
use rustix::io::Errno;

/// Who may do what with a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessList {
    /// Tag, the permissions (4 read, 2 write), and the user or the group; sorted, as the kernel wants them.
    entries: Vec<(u16, u16, u32)>,
}

/// A user may read and write.
pub const READ_WRITE: u16 = 6;
/// A user may read.
pub const READ: u16 = 4;

impl AccessList {
    /// Read and write for the file's owner, `permissions` for these users, nothing for anybody else.
    #[must_use]
    pub fn only(permissions: u16, users: &[u32]) -> Self {
        let mut list = Self {
            entries: vec![(OWNER, 6, NOBODY), (GROUP, 0, NOBODY), (OTHERS, 0, NOBODY)],
        };
        for uid in users {
            list.let_in(*uid, permissions);
        }
        list
    }

    /// What a file of this mode has that has no list.
    #[must_use]
    pub fn of_mode(mode: u32) -> Self {
        let of = |shift: u32| (mode >> shift) as u16 & 7;
        Self {
            entries: vec![
                (OWNER, of(6), NOBODY),
                (GROUP, of(3), NOBODY),
                (OTHERS, of(0), NOBODY),
            ],
        }
    }

    /// The list of a file; `None` if it has none, or its file system has no lists.
    ///
    /// # Errors
    /// The system's.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        let mut bytes = vec![0; MOST];
        match getxattr(path, ATTRIBUTE, &mut bytes) {
            Ok(len) => Ok(Some(Self::decode(&bytes[..len]))),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Makes it the list of a file.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] if its file system has no lists; the system's.
    pub fn set(&self, path: &Path) -> io::Result<()> {
        Ok(setxattr(
            path,
            ATTRIBUTE,
            &self.encode(),
            XattrFlags::empty(),
        )?)
    }

    /// Takes the list from a file; false if there was none. The permissions of its group are then what the list's users
    /// had at most.
    ///
    /// # Errors
    /// The system's.
    pub fn remove(path: &Path) -> io::Result<bool> {
        // Some file systems take away what is not there.
        if Self::of(path)?.is_none() {
            return Ok(false);
        }
        match removexattr(path, ATTRIBUTE) {
            Ok(()) => Ok(true),
            Err(Errno::NODATA) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Lets one more user in, beside everybody who may already.
    pub fn let_in(&mut self, uid: u32, permissions: u16) {
        let entries = &mut self.entries;
        entries.retain(|(tag, _, id)| *tag != MASK && (*tag, *id) != (USER, uid));
        entries.push((USER, permissions, uid));
        // What named users and groups have at most.
        let named = entries.iter().filter(|it| [USER, GROUP, 8].contains(&it.0));
        let mask = named.fold(0, |mask, it| mask | it.1);
        entries.push((MASK, mask, NOBODY));
        entries.sort_unstable_by_key(|&(tag, _, id)| (tag, id));
    }

    /// The users that it names.
    pub fn users(&self) -> impl Iterator<Item = u32> {
        let named = self.entries.iter().filter(|it| it.0 == USER);
        named.map(|it| it.2)
    }

    /// As the kernel takes it (linux/posix_acl_xattr.h): version 2, then tag, permissions, number.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = 2_u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in &self.entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(permissions.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Self {
        let entries = bytes.get(4..).unwrap_or_default().as_chunks::<8>().0;
        let entry = |&[t, u, p, q, a, b, c, d]: &[u8; 8]| {
            let (tag, permissions) = (u16::from_le_bytes([t, u]), u16::from_le_bytes([p, q]));
            (tag, permissions, u32::from_le_bytes([a, b, c, d]))
        };
        Self {
            entries: entries.iter().map(entry).collect(),
        }
    }
}

const ATTRIBUTE: &str = "system.posix_acl_access";
/// Bytes of the longest list (XATTR_SIZE_MAX).
const MOST: usize = 1 << 16;
/// ACL_USER_OBJ, ACL_USER, ACL_GROUP_OBJ, ACL_MASK, ACL_OTHER.
const OWNER: u16 = 1;
const USER: u16 = 2;
const GROUP: u16 = 4;
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;
/// The number of an entry that names nobody.
const NOBODY: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_list_is_one_that_the_kernel_takes() {
        let list = AccessList::only(READ_WRITE, &[64_055]);
        let bytes = list.encode();
        assert_eq!(bytes.len(), 4 + 5 * 8);
        assert_eq!(bytes[12..20], [2, 0, 6, 0, 0x37, 0xfa, 0, 0]);
        assert_eq!(AccessList::decode(&bytes), list);
        let two = AccessList::only(READ, &[64_055, 7]);
        assert_eq!(two.users().collect::<Vec<_>>(), [7, 64_055]);
        // Nothing that is no list panics.
        for len in 0..bytes.len() {
            AccessList::decode(&bytes[..len]);
        }
    }

    #[test]
    fn who_is_let_in_takes_nobodys_place() {
        let mut list = AccessList::of_mode(0o660);
        list.let_in(64_055, READ_WRITE);
        // The group keeps what the mode said.
        assert!(list.entries.contains(&(GROUP, 6, NOBODY)));
        list.let_in(7, READ);
        assert_eq!(list.users().collect::<Vec<_>>(), [7, 64_055]);
        assert!(list.entries.contains(&(MASK, 6, NOBODY)));
        let before = list.clone();
        list.let_in(7, READ);
        assert_eq!(list, before);
    }

    #[test]
    fn a_file_has_its_list_until_it_is_taken() {
        let dir = vnplug_testing::TestDir::new("access-list");
        let path = dir.path("file");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(AccessList::of(&path).unwrap(), None);
        assert!(!AccessList::remove(&path).unwrap());
        let list = AccessList::only(READ, &[7, 65_534]);
        match list.set(&path) {
            // The file system of the tests may have none.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => return,
            set => set.unwrap(),
        }
        assert_eq!(AccessList::of(&path).unwrap(), Some(list));
        assert!(AccessList::remove(&path).unwrap());
        assert_eq!(AccessList::of(&path).unwrap(), None);
    }
}
