//! TLS 1.3: the server's certificate, and whose clients' certificates it asks for.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer,
};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use crate::secret;

/// Of PEM files; with `clients`, who has no certificate of that CA is not spoken to, nor whose is in the lists beside it.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn config(
    certificate: &Path,
    key: &Path,
    clients: Option<(&Path, Option<&Path>)>,
) -> Result<Arc<ServerConfig>, String> {
    let provider = Arc::new(ring::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| error.to_string())?;
    let config = match clients {
        None => config.with_no_client_auth(),
        Some((path, revoked)) => {
            let about = |what: &dyn ToString| format!("{}: {}", path.display(), what.to_string());
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| about(&error))?;
            }
            let mut verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            if let Some(path) = revoked {
                verifier = verifier.with_crls(lists(path)?);
            }
            config.with_client_cert_verifier(verifier.build().map_err(|error| about(&error))?)
        }
    };
    let about = |what: &dyn ToString| format!("{}: {}", key.display(), what.to_string());
    let private = PrivateKeyDer::from_pem_slice(&secret::read(key, true)?);
    let private = private.map_err(|_| about(&"there is no private key in it, as PEM"))?;
    let mut config = config
        .with_single_cert(certificates(certificate)?, private)
        .map_err(|error| about(&format!("{error} (with {})", certificate.display())))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let bytes = secret::read(path, false)?;
    let found = CertificateRevocationListDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(format!(
            "{}: there is no list of revoked certificates in it, as PEM",
            path.display()
        )),
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let about = |what: &str| format!("{}: {what}", path.display());
    let bytes = secret::read(path, false)?;
    let found = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(about("there is no certificate in it, as PEM")),
    }
}
